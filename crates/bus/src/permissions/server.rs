//! The table as configuration of the NATS server.

use std::fmt::Write as _;

use super::User;

/// The `users` of the server's `authorization` with their permissions. Passwords are environment
/// variables of the server ([`User::password_variable`]). They must begin with a letter, because
/// the server parses their values as configuration.
pub fn config() -> String {
    let mut text = String::from(
        "# NATS permissions, generated from crates/bus/src/permissions.rs:\n\
         # UPDATE_DOCS=1 ./dev test -E 'test(permissions_match_the_committed_files)'\n\
         # In the server's configuration: authorization { include \"permissions.conf\" }\n\
         # Each password is an environment variable of the server and begins with a letter.\n\
         users: [\n",
    );
    for user in User::ALL {
        let permissions = user.permissions();
        // Writing to a string cannot fail.
        let _ = write!(
            text,
            "  {{\n    user: {}\n    password: ${}\n    permissions: {{\n",
            user.name(),
            user.password_variable()
        );
        let _ = writeln!(text, "      publish: {{");
        list(&mut text, "allow", &permissions.publish);
        if !permissions.deny.is_empty() {
            list(&mut text, "deny", &permissions.deny);
        }
        let _ = writeln!(text, "      }}\n      subscribe: {{");
        list(&mut text, "allow", &permissions.subscribe);
        let _ = writeln!(text, "      }}\n    }}\n  }}");
    }
    text.push_str("]\n");
    text
}

fn list(text: &mut String, name: &str, subjects: &[String]) {
    let mut sorted: Vec<_> = subjects.iter().collect();
    sorted.sort();
    let _ = writeln!(text, "        {name}: [");
    for subject in sorted {
        let _ = writeln!(text, "          \"{subject}\"");
    }
    let _ = writeln!(text, "        ]");
}
