"""`python -m vmd`."""

from vmd.cli import main

main()
