//! epoxide
