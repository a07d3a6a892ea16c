"""One torch thread: the machine is shared, and the tensors are small."""

import torch

torch.set_num_threads(1)
