//! The REST routes, from the contract's options `google.api.http` and `example`: the method of each
//! route, and the source of each field of its request.

use std::sync::LazyLock;

use construct_proto::{
    google::api::{HttpRule, http_rule::Pattern},
    options,
};
use prost_reflect::MethodDescriptor;
use tonic::codegen::http::Method as Verb;

/// One route.
#[derive(Debug)]
pub(crate) struct Route {
    pub(crate) verb: Verb,
    /// `{field}` stands for a field of the request.
    pub(crate) path: &'static str,
    /// `Service/Method`, of `construct.v1`.
    pub(crate) method: &'static str,
    pub(crate) body: Content,
}

/// What the body of a request contains. Fields that are neither in the body nor in the path are
/// query parameters; the idempotency key is a header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Content {
    None,
    /// All fields that are not in the path, with an example.
    All(&'static str),
    /// One field, with an example.
    Field(&'static str, &'static str),
}

/// All routes, in the order of the contract.
pub(crate) static ROUTES: LazyLock<Vec<Route>> =
    LazyLock::new(|| construct_proto::methods().flat_map(routes).collect());

/// The routes of a method. Strings are leaked: there is one table for the life of the process.
fn routes(method: MethodDescriptor) -> Vec<Route> {
    let name: &str = format!("{}/{}", method.parent_service().name(), method.name()).leak();
    let example = options::example(&method).map_or("{}", |example| example.leak());
    let Some(mut rule) = options::http(&method) else { return Vec::new() };
    let additional = std::mem::take(&mut rule.additional_bindings);
    [rule].into_iter().chain(additional).filter_map(|rule| route(rule, name, example)).collect()
}

fn route(rule: HttpRule, method: &'static str, example: &'static str) -> Option<Route> {
    let (verb, path) = match rule.pattern? {
        Pattern::Get(path) => (Verb::GET, path),
        Pattern::Put(path) => (Verb::PUT, path),
        Pattern::Post(path) => (Verb::POST, path),
        Pattern::Delete(path) => (Verb::DELETE, path),
        Pattern::Patch(path) => (Verb::PATCH, path),
        Pattern::Custom(_) => return None,
    };
    let body = match rule.body.as_str() {
        "" => Content::None,
        "*" => Content::All(example),
        _ => Content::Field(rule.body.leak(), example),
    };
    Some(Route { verb, path: path.leak(), method, body })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn contract_methods_have_routes() {
        for method in construct_proto::methods() {
            let name = format!("{}/{}", method.parent_service().name(), method.name());
            assert!(
                ROUTES.iter().any(|route| route.method == name),
                "{name} needs the option `google.api.http`"
            );
        }
    }

    #[test]
    fn path_parameters_are_singular_fields() {
        for route in ROUTES.iter() {
            let places =
                route.path.split('/').filter(|part| part.contains(['{', '}', '*', '=', ':']));
            assert_eq!(places.count(), route.fields().count(), "{}", route.path);
        }
    }
}
