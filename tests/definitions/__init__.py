"""Definitions of the methods in plain torch, for one rank and two modalities; the pages of the papers show them."""
