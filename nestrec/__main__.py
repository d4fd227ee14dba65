"""Entry point of `python -m nestrec`, which torchrun and `nestrec launch` also use."""

from nestrec.cli.app import main

main()
