"""Returns a list and a dict that contain themselves.

tests: calls source
"""


def double(n):
    values = [6]
    values.append({"self": values})
    return values
