//! launchd of macOS, which runs agents of the logged-in user, and the file of our agent.

use std::{
    env, fs,
    io::ErrorKind,
    path::{Path, PathBuf},
    process::{Command, Output},
};

use rustix::process::getuid;

use super::{
    systemd::error_message,
    units::{self, Settings, Unit},
};
use crate::{failure::Failure, mesh};

/// The label of the agent.
const LABEL: &str = "construct.mesh";
/// The agent's file name.
const FILE: &str = "construct.mesh.plist";
/// The beginning of files that this program wrote.
pub(crate) const MARK: &str = "\
<?xml version=\"1.0\" encoding=\"UTF-8\"?>
<!-- Written by `construct daemon install`, which replaces it. -->
";
/// The exit code of `launchctl bootout` while the agent is still stopping (`EINPROGRESS` of macOS).
const IN_PROGRESS: i32 = 36;

/// The user's `Library` directory.
///
/// # Errors
/// When HOME is not set.
fn library() -> Result<PathBuf, Failure> {
    let home = env::var_os("HOME").map(PathBuf::from).filter(|path| path.is_absolute());
    home.map(|home| home.join("Library"))
        .ok_or_else(|| Failure::usage("launchd's agents are stored below HOME, which is not set"))
}

/// The directory with the user's agents.
///
/// # Errors
/// When HOME is not set.
pub(crate) fn folder() -> Result<PathBuf, Failure> {
    Ok(library()?.join("LaunchAgents"))
}

/// The path of the agent's file.
///
/// # Errors
/// When HOME is not set.
pub(crate) fn path() -> Result<PathBuf, Failure> {
    Ok(folder()?.join(FILE))
}

/// The agent's file.
///
/// # Errors
/// When a path has characters that the file cannot hold.
pub(crate) fn agent(settings: &Settings) -> Result<Unit, Failure> {
    agent_in(settings, &library()?)
}

fn agent_in(settings: &Settings, library: &Path) -> Result<Unit, Failure> {
    let program = xml_text(&settings.program)?;
    let mut variables = settings.variables();
    // launchd's default has only the system's programs.
    variables.extend(settings.search_path.as_deref().map(|path| ("PATH", path)));
    let mut environment = String::new();
    for (name, value) in variables {
        environment.push_str(&format!(
            "    <key>{name}</key>\n    <string>{}</string>\n",
            xml_text(value)?
        ));
    }
    let log = xml_text(&library.join("Logs").join("construct.log"))?;
    let text = format!(
        "\
{MARK}<!DOCTYPE plist PUBLIC \"-//Apple//DTD PLIST 1.0//EN\" \"http://www.apple.com/DTDs/PropertyList-1.0.dtd\">
<plist version=\"1.0\">
<dict>
  <key>Label</key>
  <string>{LABEL}</string>
  <key>ProgramArguments</key>
  <array>
    <string>{program}</string>
    <string>daemon</string>
    <string>run</string>
  </array>
  <key>EnvironmentVariables</key>
  <dict>
{environment}  </dict>
  <key>RunAtLoad</key>
  <true/>
  <!-- Restart after a failure, but not after a stop. -->
  <key>KeepAlive</key>
  <dict>
    <key>SuccessfulExit</key>
    <false/>
  </dict>
  <key>ThrottleInterval</key>
  <integer>10</integer>
  <key>ExitTimeOut</key>
  <integer>90</integer>
  <!-- Not throttled like a background process. -->
  <key>ProcessType</key>
  <string>Interactive</string>
  <key>StandardOutPath</key>
  <string>{log}</string>
  <key>StandardErrorPath</key>
  <string>{log}</string>
</dict>
</plist>
"
    );
    Ok(Unit { name: FILE, mark: MARK, text })
}

/// The data directory of the installed agent.
pub(crate) fn data(file: &Path) -> Option<PathBuf> {
    let text = fs::read_to_string(file).ok().filter(|text| text.starts_with(MARK))?;
    let key = format!("<key>{}</key>", mesh::HOME_VARIABLE);
    let mut lines = text.lines().map(str::trim);
    lines.find(|line| *line == key)?;
    let value = lines.next()?.strip_prefix("<string>")?.strip_suffix("</string>")?;
    Some(value.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&").into())
}

/// A path as the text of an XML element.
fn xml_text(path: &Path) -> Result<String, Failure> {
    Ok(units::path_text(path)?.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;"))
}

/// A reachable launchd.
#[derive(Debug)]
pub(crate) struct Launchd {
    /// The domain of the user's graphical session.
    domain: String,
}

impl Launchd {
    /// # Errors
    /// When there is no launchd, or the user has no graphical session.
    pub(crate) fn find() -> Result<Self, Failure> {
        let domain = format!("gui/{}", getuid().as_raw());
        let reason = match launchctl(&["print", &domain]) {
            Ok(output) if output.status.success() => return Ok(Self { domain }),
            Ok(output) => error_message(&output),
            Err(error) if error.kind() == ErrorKind::NotFound => "there is no launchctl".to_owned(),
            Err(error) => format!("launchctl cannot be run: {error}"),
        };
        Err(Failure::failed(format!("launchd is not available ({reason})")).hint(
            "it needs a graphical log-in; construct daemon run runs the mesh in the foreground, install --no-start only writes the file",
        ))
    }

    /// Whether the agent is loaded.
    ///
    /// # Errors
    /// When launchctl cannot be run.
    pub(crate) fn is_loaded(&self) -> Result<bool, Failure> {
        // Its output is for people, and differs between versions.
        Ok(launchctl(&["print", &self.target()])?.status.success())
    }

    /// Loads the agent, which starts the mesh.
    ///
    /// # Errors
    /// When launchd refuses.
    pub(crate) fn load(&self, file: &Path) -> Result<(), Failure> {
        // launchd refuses to load a disabled agent.
        run(&["enable", &self.target()])?;
        run(&["bootstrap", &self.domain, units::path_text(file)?])
    }

    /// Unloads the agent until the next log-in, which stops the mesh.
    ///
    /// # Errors
    /// When launchd refuses.
    pub(crate) fn unload(&self) -> Result<(), Failure> {
        let target = self.target();
        let arguments = ["bootout", target.as_str()];
        let output = launchctl(&arguments)?;
        if output.status.code() == Some(IN_PROGRESS) {
            Ok(())
        } else {
            check_success(&arguments, &output)
        }
    }

    fn target(&self) -> String {
        format!("{}/{LABEL}", self.domain)
    }
}

fn run(arguments: &[&str]) -> Result<(), Failure> {
    check_success(arguments, &launchctl(arguments)?)
}

fn check_success(arguments: &[&str], output: &Output) -> Result<(), Failure> {
    if output.status.success() {
        return Ok(());
    }
    Err(Failure::failed(format!("launchctl {}: {}", arguments.join(" "), error_message(output))))
}

fn launchctl(arguments: &[&str]) -> std::io::Result<Output> {
    Command::new("launchctl").args(arguments).output()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mesh::MeshPaths;

    fn settings() -> Settings {
        Settings {
            program: "/opt/a b/construct".into(),
            paths: MeshPaths {
                script: "/src/R&D/deploy/docker/mesh".into(),
                home: "/Users/ann/construct".into(),
            },
            target: None,
            environment: "/Users/ann/.config/construct/daemon.env".into(),
            search_path: Some("/opt/homebrew/bin:/usr/bin:/bin".into()),
        }
    }

    #[test]
    fn agent_file_matches_golden_file() {
        let agent = agent_in(&settings(), Path::new("/Users/ann/Library")).unwrap();
        assert_eq!((agent.name, agent.mark), (FILE, MARK));
        assert_eq!(agent.text, include_str!("golden/construct.mesh.plist"));
    }

    #[test]
    fn xml_special_characters_are_escaped_and_read_back() {
        let home = Path::new("/a <b> & &amp; \"c\" </string>");
        let paths = MeshPaths { home: home.to_owned(), ..settings().paths };
        let odd = Settings { paths, target: Some("/t<".into()), ..settings() };
        let agent = agent_in(&odd, Path::new("/Users/<ann>/Library")).unwrap();
        for line in [
            "    <string>/a &lt;b&gt; &amp; &amp;amp; \"c\" &lt;/string&gt;</string>",
            "    <key>CARGO_TARGET_DIR</key>",
            "    <string>/t&lt;</string>",
            "  <string>/Users/&lt;ann&gt;/Library/Logs/construct.log</string>",
        ] {
            assert!(agent.text.lines().any(|other| other == line), "{line}: {}", agent.text);
        }
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(data(&folder.path().join(FILE)), None);
        agent.write(folder.path()).unwrap();
        assert_eq!(data(&folder.path().join(FILE)).as_deref(), Some(home));
        let broken = Settings { program: "/a\u{1}".into(), ..settings() };
        assert!(
            agent_in(&broken, Path::new("/Users/ann/Library")).is_err(),
            "XML has no such character"
        );
    }
}
