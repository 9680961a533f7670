//! The gateway process. `construct-gateway migrate` only migrates the database schema, `first-key`
//! creates the operator's first key, and `keys` rotates the keys for encryption and signatures.

use std::process::ExitCode;

use construct_gateway::{first_key, migrate, rotation};

fn main() -> ExitCode {
    let mut arguments: Vec<_> = std::env::args_os().collect();
    if arguments.get(1).is_some_and(|mode| mode == migrate::MODE) {
        arguments.remove(1);
        return construct_runtime::main_with_arguments("gateway", arguments, migrate::run);
    }
    if arguments.get(1).is_some_and(|mode| mode == first_key::MODE) {
        arguments.remove(1);
        return construct_runtime::main_with_arguments("gateway", arguments, first_key::run);
    }
    if arguments.get(1).is_some_and(|mode| mode == rotation::MODE) {
        let command = match rotation::Command::parse(arguments.drain(1..).skip(1)) {
            Ok(command) => command,
            Err(usage) => {
                eprintln!("{usage}");
                return ExitCode::from(2);
            }
        };
        let run = async |rotation::Config {}, context: &_| rotation::run(command, context).await;
        return construct_runtime::main_with_arguments("gateway", arguments, run);
    }
    construct_runtime::main("gateway", construct_gateway::run)
}
