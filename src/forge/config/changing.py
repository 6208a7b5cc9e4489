"""Change values of a configuration that was loaded before, under the rules of its schema."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import ValidationError

from forge.config.base import ConfigModel
from forge.config.diagnosis import diagnose
from forge.config.loading import to_plain
from forge.config.problems import InvalidConfig

C = TypeVar("C", bound=ConfigModel)


def with_values(config: C, values: Mapping[str, Any]) -> C:
    """Return a configuration with other values under dotted keys of its sections, checked as a loaded one is: types,
    bounds, and rules between keys. Raise `InvalidConfig` with everything that is wrong."""
    data = to_plain(config)
    for key, value in values.items():
        *above, name = key.split(".")
        section = data
        for each in above:
            section = section[each]
        section[name] = value
    try:
        return type(config).model_validate_json(json.dumps(data), strict=True)
    except ValidationError as error:
        raise InvalidConfig(diagnose(error, schema=type(config), data=data, origins={})) from None
