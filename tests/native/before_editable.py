"""Goes beside a copy of the package as `sitecustomize.py`: an editable install would be found before the copy."""

import sys

sys.meta_path[:] = [f for f in sys.meta_path if type(f).__name__ != "ScikitBuildRedirectingFinder"]
