"""Catalog: the models, data files and verifiers that a job here may name."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter

from services.common.catalog import read_catalog
from services.gateway.dependencies import GUARDS, ContextDep
from services.gateway.errors import documented
from services.gateway.schemas import CatalogAnswer

router = APIRouter(tags=["jobs"], dependencies=GUARDS)


@router.get("/catalog", operation_id="get_catalog", summary="What a job may name", responses=documented(422))
async def catalog(context: ContextDep) -> CatalogAnswer:
    """Models and data files below the allowed directories and from hubs, each by the name that a job writes, and all verifiers."""
    return CatalogAnswer.model_validate(await asyncio.to_thread(read_catalog, context.settings))
