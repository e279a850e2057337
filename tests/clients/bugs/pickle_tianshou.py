import numpy as np
from tianshou.data import Batch, ReplayBuffer

import engram.data


class Code:
    def __reduce__(self):  # what pickle calls when it reads this object
        return print, ("       code of the file runs",)


step = {"obs": 0, "act": 0, "rew": 0.0, "terminated": False, "truncated": False, "obs_next": 0}
there = ReplayBuffer(2)
there.add(Batch(**step, info={"note": np.array(Code(), dtype=object)}))
there.save_hdf5("buffer.hdf5")
print("there")
ReplayBuffer.load_hdf5("buffer.hdf5")
here = engram.data.ReplayBuffer(storage=engram.data.ListStorage(2))
here.add({**step, "note": Code()})
try:
    here.dumps("buffer")
except (TypeError, ValueError) as error:
    print("here   refused:", str(error).split(";")[0].split(":")[0])
