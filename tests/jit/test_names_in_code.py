"""The names that the bytecode of a function uses, from which jit knows what a program depends on:
the same from each version of Python, whose instructions differ.
"""

from __future__ import annotations

import types

import pytest

from bridge.programs.code_names import GRAD, read_by

#: By its text, what a function of x, y and the global variables g and h uses, beside the names that
#: it only calls.
CASES: dict[str, dict[str, set[str]]] = {
    "return x.weight + g": {"globals": {"g"}, "used": {"weight", "g"}},
    "return x.weight[0], x.stats[y]": {"used": {"weight", "stats"}},
    "return g['a'], x.table['b']": {"opened": {"g", "table"}, "used": {"a", "b"}},
    "g.append(x); x.log.append(2); x.log['k'].extend(y)": {
        "added": {"g", "log", "k"},
        "opened": {"log"},
        "used": set(),
    },
    "g['n'] += 1; g['last'] = y; g['log'].append(y)": {
        "opened": {"g"},
        "added": {"log"},
        "used": {"n"},
    },
    "g['a']['b'] += 1; del g['a']['c']": {"opened": {"g", "a"}, "used": {"b"}},
    "g['log'] += [y]; x.h = g['h'].log": {"opened": {"g"}, "added": set(), "used": {"log", "h"}},
    "for k in x: g['log'][k].append(x[k])": {
        "opened": {"g", "log"},
        "added": {"log[]"},
        "used": set(),
    },
    "g[y].append(g[x])": {"opened": {"g"}, "added": {"g[]"}, "used": {"g"}},
    "return g[(k := 'n')]": {"opened": set(), "used": {"g"}},
    "x.calls += 1": {"used": {"calls"}, "stored": {"calls"}, "loaded": {"calls"}},
    "x.last = y; del x.old": {"stored": {"last", "old"}, "loaded": set()},
    "global g; g = x": {"stored": {"g"}, "set_globals": {"g"}, "globals": set()},
    "global g; g = x; return g": {"set_globals": {"g"}, "globals": {"g"}, "loaded": {"g"}},
    "import os.path; return os.path.sep": {"imports": {"os.path"}, "used": {"path", "sep"}},
    "return x.grad": {"names": {"grad", GRAD}},
    "return x.grad(y)": {"names": {"grad"}},
    "return getattr(x, 'scale')": {"optional": {"scale"}},
    "return getattr(x, 'scale', 1), hasattr(y, 'bias')": {"optional": {"scale", "bias"}},
    "return getattr(x, 'a' if y else 'b')": {"optional": set(), "names": {"getattr", "__dict__"}},
    "return getattr(x, f'a{y}')": {"optional": set(), "names": {"getattr", "__dict__"}},
    "setattr(x, 'scale', 2)": {"stored": {"scale"}},
    "setattr(x, y, 2); delattr(x, 'old')": {"stored": {"__dict__", "old"}},
    "return [g + i.bias for i in x]": {"globals": {"g"}, "used": {"g", "bias"}},
    "return lambda: (g, x.bias, y['k'])": {"globals": {"g"}, "used": {"g", "x", "bias", "k"}},
    "return all(i.on for i in x.parts), 3": {"globals": {"all"}, "used": {"all", "on", "parts"}},
    "assert x.on, 'off'; return h[y.at : 2]": {"globals": {"h"}, "used": {"on", "h", "at"}},
    "try:\n        return x.a\n    except KeyError:\n        return h": {
        "globals": {"KeyError", "h"},
        "used": {"a", "KeyError", "h"},
    },
    "match x:\n        case {'k': 1}: return g\n        case h.one: return y": {
        "globals": {"g", "h"},
        "used": {"g", "h", "one"},
    },
}


@pytest.mark.parametrize("text", CASES)
def test_names(text: str) -> None:
    space: dict[str, types.FunctionType] = {}
    exec(f"def f(x, y):\n    {text}\n", space)
    found = read_by(space["f"].__code__)._asdict()
    functions = {"getattr", "hasattr", "setattr", "delattr"}
    for field, expected in CASES[text].items():
        names = set(found[field])
        assert (names if field == "names" else names - functions) == expected, field
