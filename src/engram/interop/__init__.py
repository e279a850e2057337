"""Directories of other libraries, which `loads` reads: importing this registers their forms."""

from engram.interop.torchrl.load import is_torchrl, open_torchrl
from engram.kernel.rows import ForeignForm, register_form

register_form(ForeignForm(is_torchrl, open_torchrl))
