"""`python -m eagle_kernels ...`"""

import sys

if __name__ == "__main__":
    try:
        from .tools.cli.main import main

        status = main()
    except KeyboardInterrupt:  # importing takes seconds
        print("interrupted", file=sys.stderr)
        status = 130
    raise SystemExit(status)
