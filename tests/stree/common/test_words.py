import pytest

from stree.common.words import size


@pytest.mark.parametrize(
    ("num_bytes", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (3 << 40, "3.0 TiB")]
)
def test_sizes_are_readable(num_bytes, text):
    assert size(num_bytes) == text
