"""What a launcher imports late, for the fork server of the tests: hydra with the files of arith, and matplotlib."""

import matplotlib.backends.backend_agg
import matplotlib.pyplot  # noqa: F401

from realsys.config.compose import compose

compose(["experiment=arith"])
