"""`python -m corogen` is the command line."""

from corogen.adapters.cli import main

main()
