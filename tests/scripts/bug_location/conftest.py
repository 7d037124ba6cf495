from __future__ import annotations

import sys

from load_script import SCRIPTS

sys.path.insert(0, str(SCRIPTS / "bug_location"))  # the modules of the study
