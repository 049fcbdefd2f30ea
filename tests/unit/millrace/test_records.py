"""The client's types are those of the gateway's answers."""

from __future__ import annotations

import inspect
from typing import NotRequired, get_args, get_origin, get_type_hints

from millrace.records import ENDED, JobRecord, JobState, SampleFilters
from services.common.jobs import record
from services.gateway.routes.reads import job_rollouts
from services.gateway.schemas import Job, JobSummary


def test_a_record_has_the_fields_of_the_gateways_job_and_a_listed_one_those_of_its_summary() -> None:
    assert JobRecord.__annotations__.keys() == Job.model_fields.keys()
    hints = get_type_hints(JobRecord, include_extras=True).items()
    assert {name for name, hint in hints if get_origin(hint) is not NotRequired} == JobSummary.model_fields.keys()


def test_states_are_the_gateways() -> None:
    assert set(get_args(JobState)) == {str(state) for state in record.JobState}
    assert {str(state) for state in record.ENDED} == ENDED


def test_samples_are_filtered_by_what_the_gateway_takes() -> None:
    parameters = inspect.signature(job_rollouts).parameters.keys() - {"context", "record", "limit"}
    assert SampleFilters.__annotations__.keys() == parameters
