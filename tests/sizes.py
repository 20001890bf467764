"""How large are the tensors that a computation makes?"""

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Sizes(TorchDispatchMode):
    """The largest tensor that any operation returns."""

    def __init__(self):
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        results = function(*arguments, **(options or {}))
        # What lies in storage: a mask that is expanded takes no room.
        sizes = [each.untyped_storage().nbytes() for each in tree_leaves(results) if isinstance(each, Tensor)]
        self.largest = max(self.largest, *sizes, 0)
        return results
