"""Studies: which method is worth what, and whether the papers' claims hold, on small problems."""
