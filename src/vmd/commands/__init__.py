"""The commands of `vmd`, one file for each or for a few that belong together. Torch is imported where it is needed."""
