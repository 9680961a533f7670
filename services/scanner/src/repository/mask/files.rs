//! Kinds of files, by name.

/// The kind of a file, by its name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum FileKind {
    /// An ordinary file.
    Ordinary,
    /// Settings: values need no quotation marks.
    Settings,
    /// `NAME=value` lines, whose values may all be secrets.
    Environment,
    /// A credentials file: every value is masked.
    Credentials,
    /// A lock file, written by a tool, full of hashes that are no secrets.
    Lock,
    /// A binary key store.
    KeyStore,
}

/// The extensions of settings and shell scripts.
const SETTINGS_EXTENSIONS: [&str; 14] = [
    "yaml",
    "yml",
    "ini",
    "cfg",
    "cnf",
    "conf",
    "config",
    "properties",
    "service",
    "sh",
    "bash",
    "zsh",
    "ksh",
    "fish",
];

/// The kind of a file, by its name.
pub(super) fn file_kind(path: &str) -> FileKind {
    let name = path.rsplit('/').next().unwrap_or(path).to_ascii_lowercase();
    let extension = name.rsplit_once('.').map_or("", |(_, extension)| extension);
    let folder = path.rsplit('/').nth(1).unwrap_or("");
    // Templates of such files have no secrets, and say what is needed. The general rules apply to
    // them, too.
    let template = ["example", "sample", "template", "dist", "tmpl"].contains(&extension);
    if template {
        return FileKind::Ordinary;
    }
    match name.as_str() {
        ".env" | ".envrc" | ".flaskenv" => return FileKind::Environment,
        ".netrc" | "_netrc" | ".pypirc" | ".npmrc" | ".yarnrc" | ".git-credentials" | ".pgpass"
        | ".my.cnf" | ".htpasswd" | ".dockercfg" | ".s3cfg" | ".boto" => {
            return FileKind::Credentials;
        }
        "credentials" if [".aws", ".cargo", ".gem"].contains(&folder) => {
            return FileKind::Credentials;
        }
        "credentials.toml" if folder == ".cargo" => return FileKind::Credentials,
        "config.json" if folder == ".docker" => return FileKind::Credentials,
        "terraform.tfvars" => return FileKind::Environment,
        "cargo.lock"
        | "package-lock.json"
        | "npm-shrinkwrap.json"
        | "yarn.lock"
        | "pnpm-lock.yaml"
        | "poetry.lock"
        | "uv.lock"
        | "pipfile.lock"
        | "gemfile.lock"
        | "composer.lock"
        | "go.sum"
        | "flake.lock"
        | "bun.lock"
        | "deno.lock"
        | ".terraform.lock.hcl" => return FileKind::Lock,
        _ => {}
    }
    if name.starts_with(".env.") || extension == "env" || name.ends_with(".auto.tfvars") {
        return FileKind::Environment;
    }
    if ["p12", "pfx", "jks", "keystore", "kdbx", "ppk", "der"].contains(&extension)
        || name == "id_rsa"
    {
        return FileKind::KeyStore;
    }
    let is_made_by = |tool: &str| name == tool || name.starts_with(&format!("{tool}."));
    if SETTINGS_EXTENSIONS.contains(&extension)
        || ["dockerfile", "containerfile", "makefile", "procfile"].into_iter().any(is_made_by)
    {
        return FileKind::Settings;
    }
    FileKind::Ordinary
}
