"""Import of other trainers' configurations: from their keys to a job spec, with one line of a report for each key.

inputs    the text: YAML, Hydra overrides, shell scripts   settings  the keys, given or by default, read as numbers and texts
verl, mindspeed   tables and functions of a source         draft     the fields of the spec and the lines, as they grow
rules     the kinds of a table's entries, applied          conversions  what both sources need
result, document  what comes out: the report, the spec     convert   the whole way, from a file to a result
"""
