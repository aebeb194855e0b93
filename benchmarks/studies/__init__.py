"""Studies on small problems, which compare methods and check claims of papers."""
