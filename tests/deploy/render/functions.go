package main

import (
	"encoding/base64"
	"fmt"
	"path"
	"strings"
	"text/template"

	"github.com/Masterminds/sprig"
	"sigs.k8s.io/yaml"
)

// files is .Files: what lies in the chart outside of templates/.
type files map[string][]byte

func (f files) Get(name string) string { return string(f[name]) }

func (f files) Glob(pattern string) files {
	found := files{}
	for name, text := range f {
		if matches, _ := path.Match(pattern, name); matches {
			found[name] = text
		}
	}
	return found
}

func (f files) AsConfig() string {
	texts := map[string]string{}
	for name, text := range f {
		texts[path.Base(name)] = string(text)
	}
	return toYaml(texts)
}

func (f files) AsSecrets() string {
	texts := map[string]string{}
	for name, text := range f {
		texts[path.Base(name)] = base64.StdEncoding.EncodeToString(text)
	}
	return toYaml(texts)
}

type apiVersions []string

func (v apiVersions) Has(version string) bool {
	for _, one := range v {
		if one == version {
			return true
		}
	}
	return false
}

func toYaml(value interface{}) string {
	text, err := yaml.Marshal(value)
	if err != nil {
		return ""
	}
	return strings.TrimSuffix(string(text), "\n")
}

// What is no YAML comes back under the key Error.
func fromYaml(text string) map[string]interface{} {
	read := map[string]interface{}{}
	if err := yaml.Unmarshal([]byte(text), &read); err != nil {
		read["Error"] = err.Error()
	}
	return read
}

func fromYamlArray(text string) []interface{} {
	read := []interface{}{}
	if err := yaml.Unmarshal([]byte(text), &read); err != nil {
		return []interface{}{err.Error()}
	}
	return read
}

func required(message string, value interface{}) (interface{}, error) {
	if text, isText := value.(string); value == nil || isText && text == "" {
		return nil, fmt.Errorf("%s", message)
	}
	return value, nil
}

// functions are sprig's, less those that would let a chart look at this machine, and helm's own.
func functions(engine *template.Template) template.FuncMap {
	all := sprig.TxtFuncMap()
	delete(all, "env")
	delete(all, "expandenv")
	all["toYaml"] = toYaml
	all["fromYaml"] = fromYaml
	all["fromYamlArray"] = fromYamlArray
	all["required"] = required
	// There is no cluster to look at.
	all["lookup"] = func(string, string, string, string) map[string]interface{} { return map[string]interface{}{} }
	all["include"] = func(name string, data interface{}) (string, error) {
		var text strings.Builder
		err := engine.ExecuteTemplate(&text, name, data)
		return text.String(), err
	}
	all["tpl"] = func(text string, data interface{}) (string, error) {
		copied, err := engine.Clone()
		if err != nil {
			return "", err
		}
		parsed, err := copied.New("tpl").Parse(text)
		if err != nil {
			return "", err
		}
		var result strings.Builder
		err = parsed.Execute(&result, data)
		return result.String(), err
	}
	return all
}
