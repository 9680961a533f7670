//! Compiles the contracts: `protox` parses them in Rust, so no `protoc` is needed. Beside the types
//! it generates traits of requests, and `Debug` implementations without `debug_redact` fields.

use std::{
    collections::BTreeMap,
    env,
    fmt::Write as _,
    fs, io,
    path::{Path, PathBuf},
};

use protox::prost_reflect::{
    DescriptorPool, FieldDescriptor, Kind, MessageDescriptor, OneofDescriptor,
};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut files = Vec::new();
    find_protos(Path::new("construct"), &mut files)?;
    files.sort_unstable();
    let mut compiler = protox::Compiler::new(["."])?;
    compiler.include_source_info(true).include_imports(true).open_files(files)?;
    let (pool, out) = (compiler.descriptor_pool(), PathBuf::from(env::var("OUT_DIR")?));
    // Encoded by the compiler: prost's types of descriptors would lose our options.
    fs::write(out.join("descriptors.bin"), compiler.encode_file_descriptor_set())?;
    fs::write(out.join("requests.rs"), requests(&pool))?;
    let redacted: Vec<_> = pool
        .all_messages()
        .filter(|message| message.fields().any(|field| is_redacted(&field)))
        .collect();
    fs::write(out.join("debug.rs"), redacted.iter().map(debug).collect::<String>())?;
    tonic_prost_build::configure()
        .emit_rerun_if_changed(false)
        .compile_well_known_types(false)
        // Rarely set, and far larger than the other variants.
        .boxed(".construct.v1.TaskStatus.subtask_totals")
        .boxed(".construct.v1.Event.payload.task")
        .skip_debug(redacted.iter().flat_map(types_without_debug))
        .compile_fds(compiler.file_descriptor_set())?;
    println!("cargo:rerun-if-changed=construct");
    println!("cargo:rerun-if-changed=google");
    Ok(())
}

/// Adds every `.proto` file below a folder.
fn find_protos(folder: &Path, files: &mut Vec<PathBuf>) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.is_dir() {
            find_protos(&path, files)?;
        } else if path.extension().is_some_and(|extension| extension == "proto") {
            files.push(path);
        }
    }
    Ok(())
}

/// The traits of the requests of the public API.
fn requests(pool: &DescriptorPool) -> String {
    let services =
        pool.services().filter(|service| service.parent_file().package_name() == "construct.v1");
    let methods = services.flat_map(|service| service.methods().collect::<Vec<_>>());
    let requests: BTreeMap<_, _> =
        methods.map(|method| (method.input().full_name().to_owned(), method.input())).collect();
    let mut code = String::new();
    for (name, request) in requests {
        let path = path(&request);
        _ = writeln!(code, "impl ApiRequest for {path} {{ const NAME: &'static str = {name:?}; }}");
        if request.get_field_by_name("idempotency_key").is_some() {
            let body = "fn idempotency_key(&mut self) -> &mut String { &mut self.idempotency_key }";
            _ = writeln!(code, "impl IdempotentRequest for {path} {{ {body} }}");
        }
        let page = request.get_field_by_name("page").map(|page| page.kind());
        if page.as_ref().and_then(Kind::as_message).is_some_and(|page| page.name() == "PageRequest")
        {
            let body = "fn page(&mut self) -> &mut Option<v1::PageRequest> { &mut self.page }";
            _ = writeln!(code, "impl PagedRequest for {path} {{ {body} }}");
        }
    }
    code
}

/// Whether the value of a field must not be printed.
fn is_redacted(field: &FieldDescriptor) -> bool {
    field
        .options()
        .get_field_by_name("debug_redact")
        .is_some_and(|value| value.as_bool() == Some(true))
}

/// The types of a message without a derived `Debug`: the message and its oneofs.
fn types_without_debug(message: &MessageDescriptor) -> Vec<String> {
    let name = format!(".{}", message.full_name());
    let oneofs =
        oneofs(message).map(|oneof| format!("{name}.{}", oneof.name())).collect::<Vec<_>>();
    [name].into_iter().chain(oneofs).collect()
}

fn oneofs(message: &MessageDescriptor) -> impl Iterator<Item = OneofDescriptor> {
    message.oneofs().filter(|oneof| !oneof.is_synthetic()).collect::<Vec<_>>().into_iter()
}

/// `Debug` for a message and its oneofs, without the fields that are redacted.
fn debug(message: &MessageDescriptor) -> String {
    let is_own =
        |field: &FieldDescriptor| field.containing_oneof().is_none_or(|oneof| oneof.is_synthetic());
    let fields = message.fields().filter(|field| is_own(field) && !is_redacted(field));
    let names = fields
        .map(|field| field.name().to_owned())
        .chain(oneofs(message).map(|oneof| oneof.name().to_owned()));
    let calls: String = names.map(|name| format!(".field({name:?}, &self.r#{name})")).collect();
    let body = format!("f.debug_struct({:?}){calls}.finish_non_exhaustive()", message.name());
    let mut code = implementation(&path(message), &body);
    for oneof in oneofs(message) {
        let arms: String = oneof.fields().map(|field| arm(&field)).collect();
        let path = format!("{}::{}", module(message), camel(oneof.name()));
        code += &implementation(&path, &format!("match self {{ {arms} }}"));
    }
    code
}

fn arm(field: &FieldDescriptor) -> String {
    let name = camel(field.name());
    if is_redacted(field) {
        return format!("Self::{name}(_) => f.debug_tuple({name:?}).finish_non_exhaustive(),");
    }
    format!("Self::{name}(value) => f.debug_tuple({name:?}).field(value).finish(),")
}

fn implementation(path: &str, body: &str) -> String {
    let signature = "fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result";
    format!("impl std::fmt::Debug for {path} {{ {signature} {{ {body} }} }}\n")
}

/// The path of a message's type in the crate: `crate::v1::list_agents_request::Filter`.
fn path(message: &MessageDescriptor) -> String {
    let within = match message.parent_message() {
        Some(parent) => module(&parent),
        None => message.package_name().replace("construct", "crate").replace('.', "::"),
    };
    format!("{within}::{}", camel(message.name()))
}

/// The module of the types nested in a message.
fn module(message: &MessageDescriptor) -> String {
    let (within, name) = path(message)
        .rsplit_once("::")
        .map(|(within, name)| (within.to_owned(), snake(name)))
        .unwrap_or_default();
    format!("{within}::{name}")
}

/// Converts `api_key` to a type name as prost does.
fn camel(name: &str) -> String {
    let part = |part: &str| part[..1].to_uppercase() + &part[1..];
    name.split('_').filter(|name| !name.is_empty()).map(part).collect()
}

/// Converts `GitHubApp` to `git_hub_app`.
fn snake(name: &str) -> String {
    let mut snake = String::new();
    for letter in name.chars() {
        if letter.is_ascii_uppercase() && !snake.is_empty() {
            snake.push('_');
        }
        snake.push(letter.to_ascii_lowercase());
    }
    snake
}
