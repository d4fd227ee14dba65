"""`python -m nestrec`, which is also how torchrun starts it."""

from nestrec.cli import main

main()
