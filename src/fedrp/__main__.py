"""`python -m fedrp` is `fedrp`."""

from fedrp.cli import main

if __name__ == "__main__":
    main()
