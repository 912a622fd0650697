"""Fast, Faster and Mask R-CNN on Detectron2, the only place that imports it."""

import logging
import warnings

# What torch says about Detectron2's code, which no user of ours can change; already on its import.
warnings.filterwarnings("ignore", message=".*torch.jit.script.* is deprecated")
warnings.filterwarnings("ignore", message="torch.meshgrid")
warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
