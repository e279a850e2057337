"""Directories of other libraries, which `loads` reads: importing this registers their forms."""

from engram.interop.torchrl.load import is_torchrl, open_torchrl
from engram.kernel.rows import register_form

register_form(is_torchrl, open_torchrl)
