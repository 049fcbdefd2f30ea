"""What all dashboards share: the data source and job pickers, the links from one to the other, the time range."""

from __future__ import annotations

from grafana_foundation_sdk.builders import dashboard
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DashboardLinkType,
    VariableOption,
    VariableRefresh,
    VariableSort,
)

from deploy.dashboards.panels import DATASOURCE, Panel, Query

TAG = "millrace"


def board(name: str, description: str, *panels: Panel) -> dashboard.Dashboard:
    """A dashboard with these panels, left to right and top to bottom."""
    built = (
        dashboard.Dashboard(f"Millrace: {name}")
        .uid(f"millrace-{name.lower()}")
        .description(description)
        .tags([TAG])
        .time("now-30m", "now")
        .refresh("10s")
        .timezone("browser")
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .readonly()
        .link(
            dashboard.DashboardLink("Millrace")
            .type(DashboardLinkType.DASHBOARDS)
            .tags([TAG])
            .include_vars(True)
            .keep_time(True)
        )
        .with_variable(dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus"))
        .with_variable(
            dashboard.QueryVariable("job_id")
            .label("Job")
            .datasource(DATASOURCE)
            .query("label_values(millrace_learner_job_info, job_id)")
            .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
            .sort(VariableSort.ALPHABETICAL_ASC)
            .multi(True)
            .include_all(True)
            .all_value(".*")
            .current(VariableOption(selected=True, text="All", value="$__all"))
        )
    )
    for number, panel in enumerate(panels, start=1):
        built.with_panel(panel.id(number))
    return built


def of_job(expr: str) -> str:
    """A learner's series under the name of the job that it trains, for the jobs picked."""
    return f'{expr} * on (instance) group_left (job_id) millrace_learner_job_info{{job_id=~"$job_id"}}'


def rate(metric: str, by: str = "") -> str:
    """Increase per second of a counter, summed over everything but the labels named."""
    return f"sum{f' by ({by})' if by else ''} (rate({metric}[$__rate_interval]))"


def quantile(share: float, metric: str, by: str = "") -> str:
    """A quantile of a histogram over the interval shown."""
    return f"histogram_quantile({share}, {rate(f'{metric}_bucket', f'le, {by}' if by else 'le')})"


def median_and_p95(metric: str, by: str = "") -> tuple[Query, Query]:
    """The two quantiles of a histogram that the dashboards show."""
    of = f"{{{{{by}}}}} " if by else ""
    return Query(quantile(0.5, metric, by), f"{of}median"), Query(quantile(0.95, metric, by), f"{of}p95")
