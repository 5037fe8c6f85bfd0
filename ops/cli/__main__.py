"""`python -m ops.cli`, the same as `perdure`."""

from ops.cli import main

main(prog_name="perdure")
