"""A sequence model of a few lines: it adds up what a sequence sends.

`SETTINGS` shows the overrides that the server process handed down, and the Python that runs it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

OVERRIDES = json.loads(os.environ.get("OASR_BACKEND_OVERRIDES", "{}"))


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        parameters = json.loads(args["model_config"])["parameters"]
        delay_s = OVERRIDES.get("load_delay_s", parameters["load_delay_s"]["string_value"])
        time.sleep(float(delay_s))
        self.sums: dict[int | str, float] = {}

    def execute(self, requests: list[Any]) -> list[Any]:
        return [self._answer(request) for request in requests]

    def _answer(self, request: Any) -> Any:
        stream_id = request.correlation_id()
        if request.flags() & pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START:
            self.sums[stream_id] = 0.0
        values = pb_utils.get_input_tensor_by_name(request, "VALUES").as_numpy()
        self.sums[stream_id] += float(values.sum())
        settings = {"overrides": OVERRIDES, "prefix": sys.prefix, "pid": os.getpid()}
        outputs = [
            pb_utils.Tensor("SUM", np.array([[self.sums[stream_id]]], dtype=np.float32)),
            pb_utils.Tensor("SETTINGS", np.array([[json.dumps(settings)]], dtype=np.object_)),
        ]
        return pb_utils.InferenceResponse(output_tensors=outputs)
