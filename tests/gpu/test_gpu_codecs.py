"""Codecs on a GPU give the words that they give on a CPU, but for values at the border between two codes."""

import gpu_checks as checks
import pytest
from gpu_devices import NEEDS_GPU

pytestmark = NEEDS_GPU

MODES = ["eager", "graph", "compiled"]
# The largest difference of a decoded value, relative to the largest value of its row: one step of the codec. A GPU adds
# in another order and divides with another last bit. This moves values at the border of two codes to the other code,
# and changes the last bit of scales. For topk the bound is the largest value that it leaves out, since a GPU may send
# another of two nearly equal values.
STEP = {"float16": 2**-10, "bfloat16": 2**-7, "int8": 1 / 127, "int4": 1 / 7, "sign": 1e-5}
OTHER_WORDS = 0.05  # The share of words that may differ.


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("codec", [name for name in checks.CODECS if name != "powersgd"])
def test_words_equal_those_of_the_cpu(gpu_pools, codec, mode):
    (found,) = gpu_pools().run(checks.codec_differences, codec, mode)
    print(codec, mode, found)
    assert found["words"] <= OTHER_WORDS
    assert found["decoded"] <= (found["residual"] if codec.startswith("topk") else STEP[codec]) * (1 + 1e-5)
    assert max(found["lost"], default=0) <= 1e-6, "the residual is what was not sent"
    assert len(found["lost"]) == (0 if codec == "topk_momentum" else 2)
