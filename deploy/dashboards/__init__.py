"""The Grafana dashboards as code. `python -m deploy.dashboards` writes their JSON to deploy/grafana/dashboards/."""
