"""Manifests against the schemas that Kubernetes and Kubeflow publish, from packages that carry them."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

# The oldest Kubernetes that has all fields in use, and the newest that the package knows.
VERSIONS = ("1.33", "1.37")


def documents(text: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(text))


def validate(document: dict[str, Any]) -> None:
    """Check one object.

    Raises:
        AssertionError: it does not follow its schema, or has a field that the schema does not know.
    """
    if document["apiVersion"].startswith("trainer.kubeflow.org/"):
        _validate_kubeflow(document)
        return
    kubernetes = pytest.importorskip("kubernetes_validate")
    for version in VERSIONS:
        try:
            kubernetes.validate(document, version, strict=True)
        except (kubernetes.ValidationError, kubernetes.SchemaNotFoundError) as error:
            raise AssertionError(f"{document['kind']}, Kubernetes {version}: {error}") from error


def _validate_kubeflow(document: dict[str, Any]) -> None:
    """A JobSet's job template is part of a runtime's model, down to each container's fields."""
    models = pytest.importorskip("kubeflow_trainer_api.models")
    version = document["apiVersion"].partition("/")[2].capitalize()
    kind = getattr(models, f"Trainer{version}{document['kind']}", None)
    assert kind is not None, f"there is no kind {document['kind']} in {document['apiVersion']}"
    try:
        understood = kind.from_dict(document).to_dict()
    except ValueError as error:  # pydantic's
        raise AssertionError(f"{document['kind']}: {error}") from error
    # Fields that the model does not know are dropped, not refused.
    assert understood == document
