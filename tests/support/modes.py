"""The two ways in which MindSpore runs a step."""

import mindspore as ms

MODES = {"graph": ms.GRAPH_MODE, "pynative": ms.PYNATIVE_MODE}
