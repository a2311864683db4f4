"""`python -m unfading` is the command `unfading`, for example under `torchrun`."""

from unfading.cli.main import main

if __name__ == "__main__":
    main()
