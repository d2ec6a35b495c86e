"""Another distribution of this import name: the one that PyPI has as `holdfast`.

    warn_of_namesake()      # a warning, where that one is installed in the same folder

Each of the two writes its files over the other's, and pip does not say so.
"""

from __future__ import annotations

import logging
import os
import re

_SITE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_NAMESAKE = re.compile(r"holdfast-([^-]+)\.dist-info")

_log = logging.getLogger("holdfast")


def warn_of_namesake(site: str = _SITE) -> None:
    """Look for the other package in the folder that this one is installed in."""
    try:
        found = [_NAMESAKE.fullmatch(name) for name in os.listdir(site)]
    except OSError:
        return
    for namesake in filter(None, found):
        _log.warning(
            "'%s' has PyPI's package holdfast %s too, which is not Holdfast and has the same import "
            "name. Files of one may have replaced the other's. Run: pip uninstall holdfast; "
            "pip install --force-reinstall --no-deps with the wheel of holdfast-ckpt",
            site,
            namesake[1],
        )
