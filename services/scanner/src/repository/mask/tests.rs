//! The secrets of each shape are composed from halves, so that no secret scanner reports this file.

use super::{files, mask, rules::Rules};
use crate::repository::{Commit, Folder, Limits, Snapshot, Source as _};

fn mask_text(path: &str, text: &str) -> (String, Vec<(&'static str, u32)>) {
    let mut found = Vec::new();
    let clean = Rules::all().mask(files::file_kind(path), text.as_bytes(), &mut found);
    (
        clean.map_or_else(
            || text.to_owned(),
            |clean| String::from_utf8(clean).expect("text stays text"),
        ),
        found,
    )
}

fn filler(count: usize) -> String {
    "aB3dE5gH7jK9mN1pQ2sT4vW6yZ8xC0fL".chars().cycle().take(count).collect()
}

fn hex(count: usize) -> String {
    "0f1e2d3c4b5a69788796a5b4c3d2e1f0".chars().cycle().take(count).collect()
}

#[test]
fn known_secret_shapes_are_masked_anywhere() {
    let shapes = [
        ("aws-access-key", format!("AKIA{}", "QWERTYUIOPASDF23")),
        ("github-token", format!("ghp_{}", filler(36))),
        ("github-token", format!("github_pat_{}", filler(82))),
        ("gitlab-token", format!("glpat-{}", filler(20))),
        ("slack-token", format!("xoxb-{}", "123456789012-123456789012-abcDEF123456")),
        ("stripe-key", format!("sk_live_{}", filler(24))),
        ("google-api-key", format!("AIza{}", filler(35))),
        ("openai-key", format!("sk-proj-{}", filler(60))),
        ("anthropic-key", format!("sk-ant-api03-{}", filler(80))),
        ("huggingface-token", format!("hf_{}", filler(34))),
        ("npm-token", format!("npm_{}", filler(36))),
        ("pypi-token", format!("pypi-AgEI{}", filler(80))),
        ("sendgrid-key", format!("SG.{}.{}", filler(22), filler(43))),
        ("telegram-token", format!("123456789:AA{}", filler(33))),
        ("digitalocean-token", format!("dop_v1_{}", hex(64))),
        ("vault-token", format!("hvs.{}", filler(30))),
        ("jwt", format!("eyJ{}.eyJ{}.{}", filler(20), filler(40), filler(40))),
    ];
    for (rule, secret) in shapes {
        for text in [
            format!("x = f(\"{secret}\")\ny = 2\n"),
            format!("# see {secret} here\n"),
            format!("a\n{secret}"),
        ] {
            let (clean, found) = mask_text("src/a.py", &text);
            assert!(!clean.contains(&secret), "{rule}: {clean}");
            assert!(found.iter().any(|(by, _)| *by == rule), "{rule}: {found:?}");
            assert_eq!(clean.lines().count(), text.lines().count(), "{rule}");
        }
    }
}

#[test]
fn values_after_secret_names_are_masked_in_every_language() {
    let value = "q8Zr!f2Lw0pX5sVb";
    for line in [
        format!("password = \"{value}\""),
        format!("DB_PASSWORD: '{value}'"),
        format!("  \"client_secret\": \"{value}\","),
        format!("const apiKey = `{value}`;"),
        format!("let token: &str = \"{value}\";"),
        format!("api_key := \"{value}\""),
        format!("'auth_token' => '{value}',"),
        "secret_key: 8f742231b10e8888abcd99aa".to_owned(),
        format!("postgres://user:{value}@db.internal/x").replace('!', "_"),
        format!("curl -H 'Authorization: Bearer {}'", filler(40)),
    ] {
        let (clean, found) = mask_text("src/settings.txt", &line);
        assert_eq!(found.len(), 1, "{line} -> {clean}");
        assert!(
            !clean.contains("f2Lw0pX5sVb")
                && !clean.contains("8f742231b")
                && !clean.contains("aB3dE5"),
            "{clean}"
        );
    }
}

#[test]
fn passwords_of_letters_are_masked_after_password_names() {
    for (path, line) in [
        ("a.py", "password = \"correcthorsebattery\""),
        ("a.py", "connect(user='ann', password='correct-horse-battery-staple')"),
        ("a.py", "settings['DB_PASSWORD'] = 'correcthorsebattery'"),
        ("a.js", "const dbPassword = `CorrectHorseBattery`;"),
        ("a.ts", "const passphrase: string = 'correct.horse.battery'"),
        ("a.js", "session({ secret: 'correcthorsebattery' })"),
        ("a.go", "Password: \"correcthorsebattery\","),
        ("a.rb", ":password => 'correcthorsebattery',"),
        ("a.rs", "let password: &str = \"correcthorsebattery\";"),
        ("a.json", "  \"password\": \"correcthorsebattery\","),
        ("a.toml", "password = \"correcthorsebattery\"  # kept"),
        ("a.yml", "DB_PASSWORD: correcthorsebattery"),
        ("a.yaml", "  - POSTGRES_PASSWORD=correcthorsebattery"),
        ("a.yaml", "    password: correcthorsebattery # kept"),
        ("a.properties", "spring.datasource.password=correcthorsebattery"),
        ("a.ini", "password = correcthorsebattery ; kept"),
        ("Dockerfile", "ENV DB_PASSWORD=correcthorsebattery REGION=north"),
        ("run.sh", "PGPASSWORD=correcthorsebattery psql -c 'select 1'"),
        ("run.sh", "docker run -e DB_PASSWORD=correcthorsebattery image"),
        ("a.yml", "client_secret: correcthorsebattery"),
        ("a.yml", "DB_PWD: correcthorsebattery"),
        ("a.yml", "db: {password: correcthorsebattery, user: x}"),
        ("a.yml", "db: {user: x, Secret-Key: correcthorsebattery}"),
        ("a.ini", "pwd2 = correcthorsebattery"),
        ("Makefile", "SECRET_KEY=correcthorsebattery"),
        ("run.sh", "mysql --password=correcthorsebattery -u root"),
        ("run.sh", "password=correcthorsebattery && x"),
        ("run.sh", "client_secret=correcthorsebattery; x"),
        ("run.sh", "(passphrase=correcthorsebattery)"),
        ("run.sh", "curl https://a.example/?secret=correcthorsebattery&user=kept"),
        // Not all of these words occur in names.
        ("a.py", "password = 'mycorrecthorse'"),
        ("a.py", "db_password2 = 'hunterhunter'"),
        ("a.yml", "DB_PASSWORD: hunterhunter"),
    ] {
        let (clean, found) = mask_text(path, line);
        let rules: Vec<_> = found.iter().map(|(rule, _)| *rule).collect();
        assert_eq!(rules, ["password"], "{path}: {line} -> {clean}");
        assert!(!clean.to_lowercase().contains("horse") && !clean.contains("hunter"), "{clean}");
        assert!(!line.contains("kept") || clean.ends_with("kept"), "{clean}");
    }
}

#[test]
fn several_unquoted_passwords_on_a_line_are_masked() {
    let (clean, found) = mask_text(
        "a.yml",
        "db: {password: correcthorsebattery, client_secret: hunterhunter, user: kept}",
    );
    assert_eq!(
        clean,
        "db: {password: [masked: password], client_secret: [masked: password], user: kept}"
    );
    assert_eq!(found.len(), 2);
}

#[test]
fn words_next_to_a_password_name_are_kept() {
    for (path, text) in [
        (
            "a.py",
            "password = get_password()\npassword: str\npassword = password\npassword = Password\npassword = \"password\"\n\
             password = getpass.getpass('enter it')\npassword = settings.database_password\npasswd = '/etc/passwd'\n\
             FIELDS = ['password', 'username', 'birthdate']\nPASSWORD_FIELD = 'birthdate'\npassword_reset = 'resetlink'\n\
             password = 'wrong-password'\npassword='yourpasswordhere'\npassword = 'changeme'\npassword = None\n",
        ),
        (
            "a.py",
            "if password == confirmation: raise Invalid('password: mismatch')\nsecret = 'secretkey'\nSECRET = 'CLIENT_TRAFFIC_SECRET'\ntoken = 'identifier'\n",
        ),
        (
            "a.ts",
            "interface A { password: string; passphrase?: SecretString }\nconst f = { password: realmPassword, type: 'password' };\n\
             const KEYS = { password: 'realmPassword', passwordLabel: 'Geheimnis' };\n",
        ),
        (
            "a.rs",
            "struct A { password: SecretString, db_password: DatabasePassword }\nlet password = configuration;\n",
        ),
        ("a.php", "'password' => 'required',\n'password' => 'confirmed|required',\n"),
        ("a.java", "String password = encoder;\nprivate final Password password;\n"),
        ("de.json", "{\"password\": \"Passwort\", \"newPassword\": \"Neues Passwort\"}\n"),
        (
            "a.html",
            "<input type=\"password\" name=\"password\" placeholder=\"Kennwort\" id='password'>\n",
        ),
        (
            "a.yaml",
            "password: string\npassword: required\npassword: ${DB_PASSWORD}\npasswordSecretRef: correcthorse\npassword: {{ vault }}\n\
             description: The password: something that opens everything\n\
             secret: true\nsecret: required\nsecret: ${CLIENT_SECRET}\nclient_secret: $CLIENT_SECRET\nsecret_key: your-secret-key\n\
             db: {password: $DB_PASSWORD, pwd: default, secret: changeme}\nsecret: {{ vault }}\n",
        ),
        (
            "k8s.yaml",
            "kind: Secret\nsecretName: correcthorsebattery\nsecretRef: {name: correcthorsebattery}\nsecretKeyRef:\n  key: correcthorsebattery\n\
             secret:\n  secretName: correcthorsebattery\nimagePullSecrets: [correcthorsebattery]\n",
        ),
        (
            "a.sh",
            "PASSWORD=$(openssl rand)\nPASSWORD=$OTHER\nread -s -p 'Password: ' password\nPASSWORD=\"$DB_PASSWORD\"\n\
             mysql --password=$DB_PWD -u root\npassword=$(getpassword) && x\nSECRET_KEY=${SECRET_KEY}\nPWD=$(pwd)\n\
             if [ \"$secret\" = correcthorsebattery ]; then x; fi\npassword=changeme && x\ndocker build --secret id=correcthorsebattery .\n",
        ),
        ("README.md", "Password: mandatory\nSet password: correcthorse to begin.\n"),
        ("Cargo.lock", "password = \"correcthorsebattery\"\n"),
    ] {
        let (clean, found) = mask_text(path, text);
        assert_eq!((clean.as_str(), found), (text, Vec::new()), "{path}");
    }
}

#[test]
fn private_keys_are_masked_line_by_line() {
    let kind = "RSA PRIVATE KEY";
    let body = [filler(64), filler(64), filler(20)].join("\n");
    let text = format!("before\n-----BEGIN {kind}-----\n{body}\n-----END {kind}-----\nafter\n");
    let (clean, _) = mask_text("key.pem", &text);
    assert!(!clean.contains("aB3dE5"), "{clean}");
    assert_eq!(clean.lines().count(), text.lines().count());
    assert!(clean.starts_with("before\n") && clean.ends_with("after\n"), "{clean}");
    let one = format!(
        "key = \"-----BEGIN {kind}-----\\n{}\\n-----END {kind}-----\"\nnext = 1\n",
        filler(64)
    );
    let (clean, _) = mask_text("a.py", &one);
    assert!(!clean.contains("aB3dE5") && clean.ends_with("next = 1\n"), "{clean}");
    // A key without an end must not swallow other content.
    let open =
        format!("-----BEGIN {kind}-----\n{}\nfn main() {{ \u{e9} }}\nlet x = 1;\n", filler(64));
    assert!(mask_text("a.rs", &open).0.ends_with("let x = 1;\n"));
}

#[test]
fn credentials_files_lose_all_values() {
    let (clean, found) = mask_text(
        "deploy/.env",
        "# why\nPORT=8080\nexport DB=hunter2 and more\nDEBUG=true\nEMPTY=\nNAME=\"x y\"\n",
    );
    assert_eq!(
        clean,
        "# why\nPORT=8080\nexport DB=[masked: environment-file]\nDEBUG=true\nEMPTY=\nNAME=[masked: environment-file]\n"
    );
    assert_eq!(found.len(), 2);
    assert!(!mask_text(".netrc", "machine x login me password hunter2\n").0.contains("hunter2"));
    assert!(!mask_text(".npmrc", "//registry.npmjs.org/:_authToken=short\n").0.contains("short"));
    assert!(!mask_text(".git-credentials", "https://u:hunter2@x\n").0.contains("hunter2"));
    assert!(!mask_text("a/.pypirc", "[pypi]\npassword = hunter2\n").0.contains("hunter2"));
    assert_eq!(mask_text(".env.example", "API_KEY=your-key-here\n").1, []);
    // A harmless setting is a password in a credentials file, or after a password's name.
    assert!(!mask_text("a/.pypirc", "[pypi]\npassword = 123456\n").0.contains("123456"));
    assert!(!mask_text(".env", "DB_PASSWORD=123456\n").0.contains("123456"));
    assert!(!mask_text(".env", "# DB_PASSWORD=hunter2\n").0.contains("hunter2"));
    assert!(
        !mask_text("x/.docker/config.json", "{\"auths\":{\"ghcr.io\":{\"auth\":\"dTpwYXNz\"}}}\n")
            .0
            .contains("dTpw")
    );
    let (clean, _) = mask_text(".env", "KEY=\"first\nsecond'line\nthird\"\nPORT=1\n");
    assert_eq!(clean, "KEY=[masked: environment-file]\n\n\nPORT=1\n");
}

#[test]
fn private_keys_and_tokens_on_one_line_are_masked() {
    let kind = "PRIVATE KEY";
    let token = format!("ghp_{}", filler(36));
    let key = |body: &str| format!("-----BEGIN {kind}-----{body}-----END {kind}-----");
    let text = format!("a\n-----BEGIN {kind}-----\n{}\n-----END {kind}-----\nb\n", filler(1600));
    assert_eq!(
        mask_text("k.pem", &text).0,
        format!("a\n-----BEGIN {kind}-----\n[masked: private-key]\n-----END {kind}-----\nb\n")
    );
    let body = filler(64);
    let text = format!(
        "{{\"k\":\"{}\",\"t\":\"{token}\",\"l\":\"{}\",\"u\":\"{token}\"}}\n",
        key(&body),
        key(&body)
    );
    let (clean, found) = mask_text("k.json", &text);
    assert!(!clean.contains("aB3dE5") && clean.ends_with("\"}\n"), "{clean}");
    assert_eq!(found.len(), 4, "{found:?}");
    let text = format!(
        "{}\n{body}\n-----END {kind}----- {token}\n",
        format_args!("-----BEGIN {kind}-----")
    );
    assert!(!mask_text("k.txt", &text).0.contains("aB3dE5"));
    // A truncated key in the middle of an article.
    let text = format!(
        "-----BEGIN {kind}-----\nProc-Type: 4,ENCRYPTED\n\n{body}\n{body}\nIt goes on like that.\n"
    );
    let (clean, _) = mask_text("k.md", &text);
    assert!(
        !clean.contains("aB3dE5") && clean.ends_with("\n\n\nIt goes on like that.\n"),
        "{clean}"
    );
    // Source code that names the mark.
    let text = format!(
        "if text.contains(\"-----BEGIN {kind}-----\") {{\n    return;\n}}\nlet x = \"1\";\n"
    );
    assert_eq!(mask_text("src/a.rs", &text), (text.clone(), Vec::new()));
}

#[test]
fn placeholder_matches_whole_values_only() {
    for secret in ["AKIAQWERTYTODOASDF23".to_owned(), format!("ghp_todo{}", filler(36))] {
        assert!(!mask_text("a.py", &format!("x = '{secret}'\n")).0.contains(&secret), "{secret}");
    }
    for value in ["a<b9Zr!f2Lw0pX5", "x$9Zr!f2Lw0pX5sV", "q8(r!f2Lw0pX5sVb", "9sample8Zr!f2Lw0p"] {
        assert!(
            !mask_text("a.py", &format!("password = \"{value}\"\n")).0.contains(value),
            "{value}"
        );
    }
    let long = format!("{}password: \"q8Zr!f2Lw0pX5sVb\"", "var a=1;".repeat(5000));
    assert!(!mask_text("a.js", &long).0.contains("f2Lw0"));
    for text in [
        "AKIAIOSFODNN7EXAMPLE",
        "password = \"<your password 1>\"",
        "password = \"${DB_PASSWORD_1}\"",
        "password = \"$DB_PASSWORD_1\"",
    ] {
        assert_eq!(mask_text("a.md", text).1, [], "{text}");
    }
}

#[test]
fn marks_do_not_multiply_file_size() {
    let text = "A=b\n".repeat(100_000);
    let (clean, found) = mask_text(".env", &text);
    assert!(clean.len() <= 2 * text.len() + 2000, "{}", clean.len());
    assert_eq!(
        (found.len(), clean.lines().count(), clean.contains("A=b")),
        (100_000, 100_000, false)
    );
    assert!(clean.ends_with("A=*\n"));
    let kind = "PRIVATE KEY";
    let text = format!("-----BEGIN {kind}-----\n{}-----END {kind}-----\n", "a\n".repeat(150));
    assert!(mask_text("k", &text).0.len() < text.len());
}

/// Takes a snapshot of these files.
async fn snapshot(into: &std::path::Path, files: &[(&str, &[u8])]) -> Snapshot {
    let folder = tempfile::tempdir().expect("a folder");
    for (path, content) in files {
        let path = folder.path().join(path);
        std::fs::create_dir_all(path.parent().expect("a parent"))
            .and_then(|()| std::fs::write(path, content))
            .expect("written");
    }
    let source = Folder::new(folder.path().to_owned());
    let commit = source.resolve(None).await.expect("a folder");
    Snapshot::take(&source, &commit, &Limits::default(), into).await.expect("it is honest")
}

#[tokio::test]
async fn zero_byte_hides_no_secret() {
    let into = tempfile::tempdir().expect("a folder");
    let token = format!("ghp_{}", filler(36));
    let wide: Vec<u8> = [0xff, 0xfe]
        .into_iter()
        .chain("PORT=1\r\nPASSWORD=hunter2\r\n".encode_utf16().flat_map(u16::to_le_bytes))
        .collect();
    let snapshot = snapshot(
        into.path(),
        &[
            ("a.bin", format!("\0\u{1}{token}\0end").as_bytes()),
            ("b/.env", b"A=hunter2\0\n"),
            ("c/.env", &wide),
            ("deploy.ppk", b"PuTTY-User-Key-File-2: ssh-rsa\nAAAAB3NzaC1yc2E\n"),
            ("latin.py", b"# caf\xe9\nx = 1\n"),
            ("text.bin", b"valid utf-8\0\n"),
        ],
    )
    .await;
    let clean = mask(&snapshot).await.expect("the disk works");
    let read = |path: &str| {
        String::from_utf8_lossy(&clean.read(path, 1 << 20).expect("a file")).into_owned()
    };
    assert!(
        !read("a.bin").contains(&token) && read("a.bin").ends_with("\0end"),
        "{:?}",
        read("a.bin")
    );
    assert_eq!((read("b/.env"), read("deploy.ppk")), (String::new(), "\n\n".to_owned()));
    assert_eq!(read("c/.env"), "PORT=1\r\nPASSWORD=[masked: environment-file]\r\n");
    assert_eq!(clean.report().emptied, ["b/.env"]);
    // Files that the survey reads can be cited; binary files cannot.
    assert!(clean.has_line("latin.py", 2) && !clean.has_line("text.bin", 1));
}

#[tokio::test]
async fn interrupted_or_concurrent_mask_reports_the_same() {
    let into = tempfile::tempdir().expect("a folder");
    let files: Vec<(String, String)> =
        (0..20).map(|n| (format!("f{n:02}.py"), format!("x = 'ghp_{}'\n", filler(36)))).collect();
    let files: Vec<(&str, &[u8])> =
        files.iter().map(|(path, text)| (path.as_str(), text.as_bytes())).collect();
    let snapshot = snapshot(into.path(), &files).await;
    let (one, other) = tokio::join!(mask(&snapshot), mask(&snapshot));
    let whole = one.expect("the disk works").report().clone();
    assert_eq!((whole.total, other.expect("the disk works").report()), (20, &whole));
    // The state after a crash: some files are masked, one is being written, and the report is
    // missing.
    let folder = snapshot.path().parent().expect("its folder").to_owned();
    std::fs::remove_file(folder.join("masked.json")).expect("it is there");
    std::fs::write(snapshot.path().join("f07.py"), files[7].1).expect("written");
    std::fs::write(folder.join(".writing-left"), "half").expect("written");
    assert_eq!(mask(&snapshot).await.expect("the disk works").report(), &whole);
    assert!(!folder.join(".writing-left").exists());
    assert_eq!(snapshot.read("f07.py", 99).expect("a file"), b"x = '[masked: github-token]'\n");
    // A later folder of the same name is another snapshot.
    let commit = Commit::new(&snapshot.manifest().commit, None).expect("an id");
    Snapshot::remove(&commit, into.path()).await.expect("it goes");
    let fresh = into.path().join(commit.id());
    std::fs::create_dir(&fresh).expect("a folder");
    assert!(snapshot.set_note("masked.json", &whole).is_err());
    assert!(!fresh.join("masked.json").exists());
}

#[test]
fn ordinary_code_is_unchanged() {
    let lock = format!("checksum = \"{}\"\n\"integrity\": \"sha512-{}==\"\n", hex(64), filler(86));
    for (path, text) in [
        ("Cargo.lock", lock.as_str()),
        ("package-lock.json", lock.as_str()),
        (
            "src/a.rs",
            "let token = self.next_token()?;\nlet secret: Option<String> = None;\nfn password(&self) -> &str {\n",
        ),
        (
            "src/b.py",
            "password = os.environ[\"DB_PASSWORD\"]\ntoken = get_token(user)\nsecret = input('secret: ')\n",
        ),
        (
            "src/c.ts",
            "const apiKey = process.env.API_KEY_1;\ntype Token = { kind: TokenKind };\nimport { token } from './token2';\n",
        ),
        (
            "src/d.go",
            "id := \"123e4567-e89b-12d3-a456-426614174000\"\nTokenType: TokenIdentifier,\n",
        ),
        (
            "README.md",
            "Set `API_TOKEN=<your token>` and password: \"********\". sk-learn, task-force\n",
        ),
        ("ci.yml", "token: ${{ secrets.GITHUB_TOKEN }}\npassword: $DB_PASSWORD_1\n"),
        (
            "tests/x.py",
            "lorem = \"Lorem ipsum dolor sit amet\"\nsha = \"da39a3ee5e6b4b0d3255bfef95601890afd80709\"\n",
        ),
        ("k8s.yaml", "secretName: my-service-credentials\nimage: x@sha256:0f1e2d\n"),
    ] {
        let (clean, found) = mask_text(path, text);
        assert_eq!((clean.as_str(), found), (text, Vec::new()), "{path}");
    }
}

#[tokio::test]
async fn published_snapshot_replaces_incomplete_folder() {
    let folder = tempfile::tempdir().expect("a folder");
    let (unmasked, published) = (folder.path().join("unmasked"), folder.path().join("shown"));
    let files: &[(&str, &[u8])] = &[(".env", b"PASSWORD=hunter2\n")];
    // Twice, as when another process does it meanwhile.
    for _ in 0..2 {
        let found = snapshot(&unmasked, files).await;
        let commit = Commit::new(&found.manifest().commit, None).expect("a commit");
        if !published.exists() {
            std::fs::create_dir_all(published.join(commit.id()).join("half")).expect("made");
        }
        mask(&found).await.expect("masked").publish_to(&published).await.expect("moved");
        let there = Snapshot::open(&commit, &published)
            .await
            .expect("it can be read")
            .expect("it is there");
        let text = String::from_utf8(there.read(".env", 100).expect("it is there")).expect("text");
        assert!(text.starts_with("PASSWORD=") && !text.contains("hunter2"), "{text}");
    }
}
