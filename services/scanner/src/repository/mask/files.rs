//! Files whose name says that they hold secrets.

/// What a file's name says of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// Nothing.
    Ordinary,
    /// A word after a name is a text there, and needs no quotation marks.
    Settings,
    /// `NAME=value` lines, whose values may all be secrets.
    Environment,
    /// Made to hold credentials: every value goes.
    Credentials,
    /// Written by a tool, full of hashes that are no secrets.
    Lock,
    /// A store of keys that is no text.
    KeyStore,
}

/// How files of settings and scripts of shells end.
const SETTINGS: [&str; 14] = [
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

/// What a file's name says of it.
pub(super) fn kind(path: &str) -> Kind {
    let name = path.rsplit('/').next().unwrap_or(path).to_ascii_lowercase();
    let extension = name.rsplit_once('.').map_or("", |(_, extension)| extension);
    let folder = path.rsplit('/').nth(1).unwrap_or("");
    // Templates of such files have no secrets, and say what is needed; the rules for every file
    // hold for them too.
    let template = ["example", "sample", "template", "dist", "tmpl"].contains(&extension);
    if template {
        return Kind::Ordinary;
    }
    match name.as_str() {
        ".env" | ".envrc" | ".flaskenv" => return Kind::Environment,
        ".netrc" | "_netrc" | ".pypirc" | ".npmrc" | ".yarnrc" | ".git-credentials" | ".pgpass"
        | ".my.cnf" | ".htpasswd" | ".dockercfg" | ".s3cfg" | ".boto" => {
            return Kind::Credentials;
        }
        "credentials" if [".aws", ".cargo", ".gem"].contains(&folder) => return Kind::Credentials,
        "credentials.toml" if folder == ".cargo" => return Kind::Credentials,
        "config.json" if folder == ".docker" => return Kind::Credentials,
        "terraform.tfvars" => return Kind::Environment,
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
        | ".terraform.lock.hcl" => return Kind::Lock,
        _ => {}
    }
    if name.starts_with(".env.") || extension == "env" || name.ends_with(".auto.tfvars") {
        return Kind::Environment;
    }
    if ["p12", "pfx", "jks", "keystore", "kdbx", "ppk", "der"].contains(&extension)
        || name == "id_rsa"
    {
        return Kind::KeyStore;
    }
    let is_made_by = |tool: &str| name == tool || name.starts_with(&format!("{tool}."));
    if SETTINGS.contains(&extension)
        || ["dockerfile", "containerfile", "makefile", "procfile"].into_iter().any(is_made_by)
    {
        return Kind::Settings;
    }
    Kind::Ordinary
}
