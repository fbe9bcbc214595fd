"""`python -m dspark_hf` is the `dspark` command."""

from .cli import main

if __name__ == "__main__":
    main()
