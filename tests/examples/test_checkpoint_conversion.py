"""The example of a checkpoint's conversion does what it says."""

import pytest

from quaver.examples import checkpoint_conversion


@pytest.mark.parametrize("format", ["finegrained-fp8", "compressed-tensors"])
def test_the_converted_checkpoint_reads_as_well(
    format: str, capsys: pytest.CaptureFixture[str]
) -> None:
    result = checkpoint_conversion.run(format)
    layers = 16 if format == "finegrained-fp8" else 28  # 128 does not divide 192
    assert len(result.converted.quantized) == len(result.loaded.quantized) == layers
    assert result.converted.bytes_after < result.converted.bytes_before
    assert result.quaver == pytest.approx(result.full, rel=0.01)
    assert result.quaver != result.full
    if format == "finegrained-fp8":
        assert result.transformers == pytest.approx(result.full, rel=0.01)
    checkpoint_conversion.main(format)
    assert "bits per byte" in capsys.readouterr().out
