"""The office's customers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from recipes.environments.office.reading import contains, page_of
from recipes.environments.office.tables import Cell, Office, Record

STATUSES = ("Qualified", "Won", "Lost", "Lead", "Proposal")
PRODUCTS = ("Software", "Hardware", "Services", "Consulting", "Training")
_TEXTS = ("customer_name", "customer_email", "product_interest", "status", "assigned_to_email")
_BOUNDS = {  # argument -> column, whether it is the lower bound
    "last_contact_date_min": ("last_contact_date", True),
    "last_contact_date_max": ("last_contact_date", False),
    "follow_up_by_min": ("follow_up_by", True),
    "follow_up_by_max": ("follow_up_by", False),
}
SEARCHED = (*_TEXTS, *_BOUNDS, "page", "page_size")
ADDED = (
    "customer_name",
    "assigned_to_email",
    "status",
    "customer_email",
    "customer_phone",
    "last_contact_date",
    "product_interest",
    "notes",
    "follow_up_by",
)


def search_customers(office: Office, **arguments: Any) -> Any:
    """Return a page of the customers that contain every text given and lie within every bound."""
    page, page_size = arguments.pop("page", 1), arguments.pop("page_size", 5)
    wanted = {name: value for name, value in arguments.items() if value}
    if not wanted:
        return "No search parameters provided. Please provide at least one parameter."
    found = [record for record in office.customers.records if _matches(record, wanted)]
    customers = page_of("customers", found, page, page_size)
    return customers if found else "No customers found."


def _matches(record: Record, wanted: dict[str, Any]) -> bool:
    for name, value in wanted.items():
        if name not in _BOUNDS:
            if not contains(record[name], value):
                return False
            continue
        column, is_lower = _BOUNDS[name]
        cell = record[column]
        if not isinstance(cell, str) or (cell < value if is_lower else cell > value):
            return False
    return True


def update_customer(
    office: Office, customer_id: Cell = None, field: Cell = None, new_value: Any = None
) -> tuple[Office, str]:
    """Change one field of a customer, the id included."""
    if not customer_id or not field or not new_value:
        return office, "Customer ID, field, or new value not provided."
    if field == "status" and new_value not in STATUSES:
        return office, f"Status not valid. Please choose from: {_quoted(STATUSES)}"
    if field == "product_interest" and new_value not in PRODUCTS:
        return office, f"Product interest not valid. Please choose from: {_quoted(PRODUCTS)}"
    value = new_value.lower() if field in ("customer_email", "assigned_to_email") else new_value
    customer = office.customers.find("customer_id", customer_id)
    if customer is None:
        return office, "Customer not found."
    if field not in customer:
        fields = ("customer_name", "assigned_to_email", *ADDED[3:7], "status", "notes", "follow_up_by")
        return office, f"Field not valid. Please choose from: {_quoted(fields)}"
    customers = office.customers.changed("customer_id", customer_id, field=str(field), to=value)
    return replace(office, customers=customers), "Customer updated successfully."


def add_customer(office: Office, **arguments: Any) -> tuple[Office, str]:
    """Add a customer; the status may be any, unlike that of an update."""
    if not all(arguments.get(name) for name in ADDED[:3]):
        return office, "Please provide all required fields: customer_name, assigned_to_email, status."
    given = {**dict.fromkeys(ADDED), "notes": "", **arguments}
    given["assigned_to_email"] = given["assigned_to_email"].lower()
    if given["customer_email"]:
        given["customer_email"] = given["customer_email"].lower()
    customer_id = str(office.customers.next_id("customer_id")).zfill(8)
    given["customer_id"] = customer_id
    columns = office.customers.records[0]
    customer = {column: given[column] for column in columns}
    return replace(office, customers=office.customers.appended(customer, is_renumbered=True)), customer_id


def delete_customer(office: Office, customer_id: Cell = None) -> tuple[Office, str]:
    """Delete one customer."""
    if not customer_id:
        return office, "Customer ID not provided."
    if office.customers.find("customer_id", customer_id) is None:
        return office, "Customer not found."
    customers = office.customers.without("customer_id", customer_id)
    return replace(office, customers=customers), "Customer deleted successfully."


def _quoted(names: tuple[str, ...]) -> str:
    return ", ".join(f"'{name}'" for name in names)
