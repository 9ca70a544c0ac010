"""What `vmd reproduce` does: systems, how they are measured, tables and figures. The library needs none of it."""
