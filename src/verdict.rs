//! The one table from outcome to status, headers, body and metric label.
