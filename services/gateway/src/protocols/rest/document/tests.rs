use prost_reflect::MethodDescriptor;

use super::*;
use crate::protocols::{
    codec,
    methods::Methods,
    rest::{files, positions, routes::ROUTES},
};

fn routes() -> Vec<(&'static Route, MethodDescriptor)> {
    let methods = Methods::new().expect("the descriptors fit together");
    let method = |route: &Route| {
        methods
            .get(&format!("/construct.v1.{}", route.method))
            .expect("a method")
            .descriptor
            .clone()
    };
    ROUTES.iter().map(|route| (route, method(route))).collect()
}

fn document() -> Value {
    build(routes().iter().map(|(route, method)| (*route, method)))
}

#[test]
fn document_contains_every_route() {
    let document = document();
    let mut ids = HashSet::new();
    for route in ROUTES.iter() {
        let operation =
            &document["paths"][display_path(route.path)][route.verb.as_str().to_lowercase()];
        let id = operation["operationId"]
            .as_str()
            .unwrap_or_else(|| panic!("{} {} is missing", route.verb, route.path));
        assert!(ids.insert(id.to_owned()), "{id} twice");
        let named = |place: &str| {
            let parameters = operation["parameters"].as_array().cloned().unwrap_or_default();
            parameters
                .iter()
                .filter(|it| it["in"] == place)
                .map(|it| it["name"].as_str().expect("a name").to_owned())
                .collect::<Vec<_>>()
        };
        let fields: Vec<_> = route
            .fields()
            .map(|field| field.rsplit('.').next().expect("a name").to_owned())
            .collect();
        assert_eq!(named("path"), fields, "{id}");
        if route.method.contains("/List") && route.path == "/v1/tasks" {
            let expected = [
                "pageSize",
                "pageToken",
                "orderBy",
                "agent",
                "phase",
                "workspace",
                "createdAfter",
                "createdBefore",
                "parent",
            ];
            assert_eq!(named("query"), expected);
        }
    }
    assert_eq!(ids.len(), ROUTES.len());
}

#[test]
fn document_contains_uploads_and_429_responses() {
    let document = document();
    let (mut ids, mut uploads) = (HashSet::new(), Vec::new());
    for (path, operations) in document["paths"].as_object().expect("paths") {
        for (verb, operation) in operations
            .as_object()
            .expect("operations")
            .iter()
            .filter(|(name, _)| *name != "parameters")
        {
            let id = operation["operationId"].as_str().expect("an id");
            assert!(ids.insert(id), "{id} twice");
            assert_eq!(
                operation["responses"]["429"]["$ref"], "#/components/responses/TooMuch",
                "{id}"
            );
            if path.starts_with("/v1/files/uploads") {
                assert!(files::is_for(&path.replace("{file}", "file_1")), "{path}");
                uploads.push((path.as_str(), verb.as_str()));
            }
        }
    }
    let (all, one) = ("/v1/files/uploads", "/v1/files/uploads/{file}");
    uploads.sort_unstable();
    assert_eq!(
        uploads,
        [
            (all, "options"),
            (all, "post"),
            (one, "delete"),
            (one, "head"),
            (one, "options"),
            (one, "patch")
        ]
    );
    let headers = &document["components"]["responses"]["TooMuch"]["headers"];
    for name in ["RateLimit", "RateLimit-Policy", "Retry-After"] {
        assert!(headers[name].is_object(), "{name}");
    }
}

#[test]
fn references_and_schemas_match() {
    fn walk(value: &Value, document: &Value) {
        match value {
            Value::Object(fields) => {
                if let Some(to) = fields.get("$ref").and_then(Value::as_str) {
                    assert!(document.pointer(&to[1..]).is_some_and(Value::is_object), "{to}");
                }
                fields.values().for_each(|value| walk(value, document));
            }
            Value::Array(values) => values.iter().for_each(|value| walk(value, document)),
            _ => {}
        }
    }
    let document = document();
    walk(&document, &document);
    let text = document.to_string();
    for name in document["components"]["schemas"].as_object().expect("schemas").keys() {
        assert!(text.contains(&format!("\"#/components/schemas/{name}\"")), "{name} is not used");
    }
}

#[test]
fn examples_match_their_schemas_and_methods() {
    let document = document();
    for (route, method) in routes() {
        let (example, field) = match route.body {
            Content::None => continue,
            Content::All(example) => (example, None),
            Content::Field(name, example) => (example, Some(name)),
        };
        let example: Value =
            serde_json::from_str(example).unwrap_or_else(|error| panic!("{}: {error}", route.path));
        let pointer = format!(
            "/paths/{}/{}/requestBody/content/application~1json",
            display_path(route.path).replace('/', "~1"),
            route.verb.as_str().to_lowercase()
        );
        let content = document.pointer(&pointer).unwrap_or_else(|| panic!("{pointer} is missing"));
        assert_eq!(content["example"], example);
        let schema = json!({"allOf": [content["schema"]], "components": document["components"]});
        let validator = jsonschema::validator_for(&schema).expect("it is a schema");
        let errors: Vec<_> =
            validator.iter_errors(&example).map(|error| error.to_string()).collect();
        assert!(errors.is_empty(), "{} {}: {errors:?}", route.verb, route.path);
        let request = field.map_or(example.clone(), |field| json!({ field: example }));
        codec::message(&method.input(), &request)
            .unwrap_or_else(|status| panic!("{} {}: {status:?}", route.verb, route.path));
    }
}

#[test]
fn document_contains_the_limits_of_the_contract() {
    let document = document();
    let at = |pointer: &str| {
        document.pointer(pointer).cloned().unwrap_or_else(|| panic!("{pointer} is missing"))
    };
    let field = |message: &str, field: &str, limit: &str| {
        at(&format!("/components/schemas/{message}/properties/{field}/{limit}"))
    };
    for (limit, expected) in [
        (field("AgentSpec", "name", "pattern"), json!("^[a-z0-9][a-z0-9._-]{0,62}$")),
        (field("AgentSpec", "description", "maxLength"), json!(1024)),
        (field("AgentSpec", "maxTurns", "maximum"), json!(1000)),
        (field("AgentSpec", "secrets", "maxItems"), json!(50)),
        (field("ModelParameters", "temperature", "maximum"), json!(2)),
        (field("ModelParameters", "stopSequences", "items/maxLength"), json!(64)),
        (field("ScanUpload", "archive", "maxLength"), json!(4 * 1024 * 1024)),
        (at("/components/schemas/AgentSpec/required"), json!(["name", "model"])),
        (at("/components/schemas/GitHubApp/required"), json!(["appId", "installationId"])),
    ] {
        assert_eq!(limit, expected);
    }
    let parameters = at("/paths/~1v1~1tasks/get/parameters");
    let size = parameters.as_array().and_then(|all| all.iter().find(|it| it["name"] == "pageSize"));
    assert_eq!(size.map(|size| size["schema"]["maximum"].clone()), Some(json!(100)));
    // Fields in the path are not required in the body as well.
    assert!(document.pointer("/components/schemas/MessageSpec/required").is_none());
}

#[test]
fn display_paths_are_distinct() {
    assert_eq!(positions("/v1/tasks/{spec.task}/messages"), "/v1/tasks/{0}/messages");
    assert_eq!(positions("/v1/{a}/{b}"), "/v1/{0}/{1}");
}
