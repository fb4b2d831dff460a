"""A key that is twice in a JSON object of another program is refused: which is meant is unknown."""

import json

import pytest

from jaxres.storage import foreign_json


@pytest.mark.parametrize("text", ['{"a": 1, "a": 2}', '[{"b": {"c": 0, "a": [], "a": []}}]'])
def test_a_key_that_an_object_has_twice_is_refused_by_name(text):
    with pytest.raises(ValueError, match="the key 'a' occurs twice in one object"):
        foreign_json.loads(text)


@pytest.mark.parametrize("text", ['{"a": {"a": 1}, "b": [{"a": 2}, {"a": 3}]}', "[]", "1", "null"])
def test_any_other_text_is_read_as_json_is(text):
    assert foreign_json.loads(text) == foreign_json.loads(text.encode()) == json.loads(text)
