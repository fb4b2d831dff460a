"""Reads SKUs of Compute Engine from Google's Cloud Billing Catalog API."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from jaxres.launch.gce.api.compute import TIMEOUT_SECONDS, Compute, brief, create_failed
from jaxres.launch.gce.state.catalog_prices import Sku
from jaxres.storage.timeouts import CallTimeout, call_with_timeout

URL = "https://cloudbilling.googleapis.com"
SERVICE = "services/6F81-5844-456A"
"""Compute Engine in the catalog."""
MAX_PAGES = 50
"""Most pages that are read; there are some 32,000 SKUs, 5000 a page."""
LOOKUP_SECONDS = 60.0
"""Longest time for all pages, with their retries."""


class CatalogUnavailable(Exception):
    """The SKUs could not be read; the message says why, and what to do."""


def list_skus(
    compute: Compute, *, regions: Collection[str], seconds: float = LOOKUP_SECONDS
) -> list[Sku]:
    """Returns the SKUs of Compute Engine that are sold in some regions.

    Args:
      compute: its credentials are used, and its endpoint if it has one.
      regions: names of the regions.
      seconds: the longest time.

    Raises:
      CatalogUnavailable: the service does not answer, or refuses.
    """
    try:
        return call_with_timeout(
            lambda: _read_pages(compute, regions, seconds), seconds=seconds, name="skus"
        )
    except CallTimeout as error:
        raise CatalogUnavailable(
            f"the Cloud Billing API has not sent all prices within {seconds:g} s"
        ) from error


def _read_pages(compute: Compute, regions: Collection[str], seconds: float) -> list[Sku]:
    from google.api_core import retry
    from google.api_core.exceptions import Forbidden, GoogleAPICallError, RetryError
    from google.auth.exceptions import GoogleAuthError
    from requests.exceptions import RequestException

    read = retry.Retry(timeout=seconds)(_read_page)
    found, token, wanted = list[Sku](), "", frozenset(regions)
    try:
        for _ in range(MAX_PAGES):
            page = read(compute, token)
            skus = page.get("skus", [])
            found += [sku for sku in skus if not wanted.isdisjoint(sku.get("serviceRegions", ()))]
            token = page.get("nextPageToken", "")
            if not token:
                return found
    except Forbidden as error:
        text = create_failed(error).message.partition(". ")[0][:200]
        command = f"gcloud services enable cloudbilling.googleapis.com --project {compute.project}"
        raise CatalogUnavailable(
            f"the Cloud Billing API refuses ({text}); `{command}` enables it"
        ) from error
    except (GoogleAPICallError, RetryError, GoogleAuthError, RequestException) as error:
        raise CatalogUnavailable(
            f"the Cloud Billing API does not answer ({brief(error)})"
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CatalogUnavailable(
            f"the Cloud Billing API has sent no list of SKUs ({type(error).__name__}: {error})"
        ) from error
    raise CatalogUnavailable(f"the Cloud Billing API has more than {MAX_PAGES} pages of SKUs")


def _read_page(compute: Compute, token: str) -> dict[str, Any]:
    from google.api_core.exceptions import from_http_response
    from google.auth.transport.requests import AuthorizedSession

    query = {"currencyCode": "USD"} | ({"pageToken": token} if token else {})
    with AuthorizedSession(compute.credentials) as session:
        response = session.get(
            f"{compute.endpoint or URL}/v1/{SERVICE}/skus", params=query, timeout=TIMEOUT_SECONDS
        )
    if response.status_code != 200:
        raise from_http_response(response)
    return response.json()
