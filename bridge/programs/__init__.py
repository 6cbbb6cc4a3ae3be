"""For all compiled programs: their keys, their guards, and the search for captured tensors."""
