"""`python -m nestrec`, which is also how torchrun starts it."""

from nestrec.cli.app import main

main()
