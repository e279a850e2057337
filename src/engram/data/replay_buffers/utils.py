"""The conversions of episode data (TED), under the path where users look for them."""

from engram.ted import Flat2TED, H5Combine, H5Split, Nested2TED, TED2Flat, TED2Nested

__all__ = ["Flat2TED", "H5Combine", "H5Split", "Nested2TED", "TED2Flat", "TED2Nested"]
