"""What all compiled programs share: keys, guards, what a function captures."""
